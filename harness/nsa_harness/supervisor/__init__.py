"""The part of nsa-harness that starts and observes processes and writes files, on one node. It never imports torch."""
