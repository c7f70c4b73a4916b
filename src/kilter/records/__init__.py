"""What a run writes to disk and sends: the run folder, checkpoints, and the wire format."""
