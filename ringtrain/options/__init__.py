"""The options, and the ways to set them.

table              what there is, and what a job was given: keywords, variables, defaults
keywords           the keywords of init(), for type checkers and editors
horovod_variables  what becomes of Horovod's environment variables
"""
