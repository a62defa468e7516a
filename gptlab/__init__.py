"""A pretraining system for small GPTs, judged by validation bits per byte."""
