"""Tables 2 and 3 and the rows beyond them from finished runs, the paper's claims tested."""
