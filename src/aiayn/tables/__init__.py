"""Tables 2 and 3 from finished runs, with the tests of the paper's claims and the criteria for a scale."""
