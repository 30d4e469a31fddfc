"""Deterministic simulation: the real protocol code in one thread, in virtual time, with every fault drawn from a seed.

    cd test; python -m simulate negotiation --seeds 0:100000
    cd test; python -m simulate elastic --seed 17 --trace

core/         worlds in C++: their fibres, clock and command line, and a file for each world (negotiation, sockets);
              kernel.cc has the simulated system calls of sockets
story.py      what worlds in Python are made of; elastic.py is one
programs.py   runs a world, and builds it before if it is in C++
planted.py    bugs that the worlds find
kept.txt      seeds that have found something; the tests tell their stories again

docs/inside/simulation.md says how to read a trace and how to write a world.
"""
