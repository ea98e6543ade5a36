"""The fork server: a process that has imported torch once, and becomes the launches of a bisection by forking.

A program of its own, loaded by file path under a private package name, like the probe. A probe of a bisection pays for
its own work, not for the imports of every process in it.
"""
