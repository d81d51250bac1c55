"""What a run is: its keys, how Hydra composes them, their scaling and checks; run folders; refused versions."""
