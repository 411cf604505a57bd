"""Who may speak, and for whom: names, certificates, invites, roles, and what TLS is given. Knows no node and no
coordinator; `cryptography` is imported here and nowhere else."""
