"""Any server with OpenAI's API under load."""
