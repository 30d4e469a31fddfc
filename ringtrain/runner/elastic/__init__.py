"""Elastic jobs: processes come and go while the job runs.

asked      what the user has asked for, with each name of it
terms      what the user allows such a job to become
fleet      which processes it should have, and where: hosts, slots, restarts, hosts that are given up
discovery  the hosts as a script of the user's names them, asked again each second
starter    in the place of the starter of other jobs: has a keeper on each host, and decides when the job is over
main       the command line of the starter
chronicle  what has happened, in words
"""
