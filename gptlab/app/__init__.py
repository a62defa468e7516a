"""What starts runs and uses trained ones: the Python API, and the programs that gptlab itself starts."""
