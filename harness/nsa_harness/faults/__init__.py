"""Faults planted on purpose, so that every verdict can be proven. Loaded only into a rank whose run asks for one.

A fault knows neither the probe nor the watcher: it happens in the middle of training, at a given rank, layer and step.
`heals_s` makes its healthy twin: the same path, over after that many seconds, and the run goes on as if nothing was.
"""
