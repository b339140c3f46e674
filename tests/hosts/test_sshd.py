"""The hosts reach each other by ssh."""

from support.sshd import Ssh


def test_each_host_is_another(ssh: Ssh) -> None:
    first = ssh.hosts.hosts[0]
    for host in ssh.hosts.hosts:
        done = first.start(["ssh", host.name, "hostname"], ssh.environ)
        assert done.communicate(timeout=30)[0] == f"{host.name}\n"
