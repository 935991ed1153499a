"""Other engines, run on the same weights and prompts: Hugging Face, llama.cpp, OpenVINO."""
