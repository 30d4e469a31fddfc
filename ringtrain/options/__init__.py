"""The options, and the ways to set them.

table              what there is, and what a job was given: keywords, variables, defaults
horovod_variables  what becomes of Horovod's environment variables
"""
