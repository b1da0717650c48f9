"""From the events of all ranks to findings: pure functions, nothing is printed here."""
