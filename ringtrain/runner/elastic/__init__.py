"""Elastic jobs: processes come and go while the job runs.

terms      what the user allows such a job to become
fleet      which processes it should have, and where: hosts, slots, restarts, hosts that are given up
discovery  the hosts as a script of the user's names them, asked again each second
starter    in the place of the starter of other jobs: has a keeper on each host, and decides when the job is over
chronicle  what has happened, in words
"""
