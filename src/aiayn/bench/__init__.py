"""Speed, measured beside other implementations."""
