"""What `python -m ringtrain.bench torch` trains: the only part of the bench, but for the peers, that imports torch.

models     the networks
training   one of them in training
"""
