"""`ringrun status`: what a running job does, and what is the matter with it.

command  the command line, and which job is meant
asking   asks all ranks at once; what is known of ranks that do not answer
waits    which operations wait for which ranks
verdict  the sentence on top
page     text and JSON
"""
