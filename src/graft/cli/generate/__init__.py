"""Verbs that answer prompts: run, chat, events."""
