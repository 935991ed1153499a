"""Requests and answers as OpenAI's API and vLLM's additions have them: functions of JSON alone."""
