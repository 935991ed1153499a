"""The command line: one file for each verb. torch is imported inside commands only."""
