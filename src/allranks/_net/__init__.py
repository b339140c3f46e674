"""The network below stores, rendezvous, agents, ranks on other hosts, and workers.

A connection begins with a handshake (`handshake`) in which both sides prove that they have the job's secret. A server
accepts connections through `admission`, so no unproved peer can delay it or fill its memory. After that, both sides
exchange frames (`frames`). Stores can encrypt their TCP connections (`tls`).
"""
