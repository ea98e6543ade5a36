"""The fork server: imports torch once, and then forks the processes of each launch.

The forked processes need not import torch again, which saves most of the time of a short launch in a bisection. The
server is a separate program. Like the probe, it is loaded by file path under a private package name.
"""
