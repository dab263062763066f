"""What the gateway does with tasks: starts, turns, pauses, endings, and the sweep. No SQL and no HTTP in here."""
