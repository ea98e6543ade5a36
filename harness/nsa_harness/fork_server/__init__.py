"""The fork server: a process that has imported torch once, and becomes the launches of a bisection by forking.

The server is a separate program. Like the probe, it is loaded by file path under a private package name. Thus a launch
of a bisection need not import torch in each of its processes.
"""
