"""The compositions behind the commands: the only modules that know every stage."""
