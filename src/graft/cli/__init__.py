"""The command line: one file for each verb, in folders by what it is for. torch is imported inside commands only."""
