"""What a person sees of a run: the live view, metrics.jsonl and report.html."""
