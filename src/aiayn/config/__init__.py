"""What a run is: its keys, how Hydra composes and scales them, and the folders named after them."""
