"""Where processes run: one machine's processes, later a Ray cluster."""
