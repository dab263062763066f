"""The environment gateway of TideRL."""
