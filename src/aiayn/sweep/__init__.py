"""Many runs: side by side on this machine, or handed to another launcher."""
