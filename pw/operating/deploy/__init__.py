"""Clusters on engines that exist: ssh, Slurm, Kubernetes, Ray and systemd start and place the daemons.

`cluster_file.py` reads the description of a cluster, `daemons.py` makes the command line of each daemon from
it, and each engine has a file that places them.
"""
