"""What every other package stands on: whole files, progress, signals, worker processes."""
