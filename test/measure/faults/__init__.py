"""Faults on purpose: one rank of a job dies, stops or raises, and the others say what they see and when.

injection  what happens to which rank, and when
rank       the program of each rank
trial      one job with one injection: starts it, and looks at what it leaves behind
soak       `python -m measure faults`: many random injections
"""
