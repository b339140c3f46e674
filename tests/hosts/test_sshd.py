"""Connections by ssh between the test hosts."""

from support.sshd import Ssh


def test_ssh_reaches_each_host(ssh: Ssh) -> None:
    first = ssh.hosts.hosts[0]
    for host in ssh.hosts.hosts:
        done = first.start(["ssh", host.name, "hostname"], ssh.environ)
        assert done.communicate(timeout=30)[0] == f"{host.name}\n"
