"""The tables of the papers as commands: what to train, how to go on after a stop, what came out."""
