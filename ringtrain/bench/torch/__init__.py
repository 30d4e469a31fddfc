"""Measurements with torch: the only part of the bench, but for the peers, that imports it.

models    the networks
training  one of them in training
"""
