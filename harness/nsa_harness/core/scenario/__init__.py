"""From a scenario to what is launched: declared, checked, resolved."""
