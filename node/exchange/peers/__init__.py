"""What every conversation with a peer needs: dialling, methods, frames, pace, and whose turn the link is.

May import atoll.protocol; nothing of the other folders of the exchange.
"""
