"""dct1k4: as dct1, of the 4 largest of each tile: one value of 1,024.

Source: DeMo, arXiv 2411.19870, whose runs send down to 4 values of a tile of 64 x 64.
"""

from __future__ import annotations

from atoll.protocol.codecs.dct1 import of_cosines
from atoll.protocol.codecs.sparse import DCT1K4

ARITHMETIC = of_cosines(DCT1K4, "b0b085066950731396cdf715be91760d7d7052f3208c3f07fa6d0a96fe21aa35")
