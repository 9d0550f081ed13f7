"""Finds the KV blocks of a sequence's beginning, where another one has computed them.

A full block is known by a digest of everything that its KV depends on: its tokens and all before
them. The digests of a sequence form a chain,

    digest[i] = SHA-256(key, digest[i - 1], tokens of block i)          digest[-1]: of the salt

with a secret key, so that nobody can construct two sequences that collide, and a salt, so that only
those who bring the same one share blocks: else the time to the first token tells whether somebody
has sent the same prompt before.

A digest only finds a block. It is a hit if its tokens are the same and it was computed after the
very block that was found before it. So a collision costs time and never changes an output.
"""

import hashlib
import itertools
import secrets
from array import array
from dataclasses import dataclass

from billfish.engine.block_pool import BlockPool
from billfish.engine.plan import NULL_BLOCK
from billfish.engine.request import Request

_KEY_BYTES = 32


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block and what its KV was computed from.

    parent: the number of the block before it in the sequence; the salt, for the first one. Numbers
    are never used again, block ids are. block_id: NULL_BLOCK once the block is used for other
    content.
    """

    number: int
    parent: int | str | None
    tokens: tuple[int, ...]
    digest: bytes
    block_id: int


class PrefixCache:
    """The full blocks of a pool by digest, whether in use or not.

    queries, hits: tokens looked up and found, by sequences when they start or start again.
    evictions: blocks whose content had to go.
    """

    def __init__(self, pool: BlockPool, key: bytes | None = None) -> None:
        """pool: keeps registered blocks that nothing refers to until it needs them. key: of the
        digests; None draws one."""
        self.pool = pool
        self.queries = 0
        self.hits = 0
        self.evictions = 0
        self._key = secrets.token_bytes(_KEY_BYTES) if key is None else key
        self._numbers = itertools.count()
        self._removed = 0
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        pool.on_evict = self._evict

    def find(self, request: Request) -> list[CachedBlock]:
        """The longest beginning of the request's known tokens that is here, in full blocks."""
        size = self.pool.block_size
        self._extend_digests(request, request.num_tokens // size)
        found: list[CachedBlock] = []
        parent: int | str | None = request.cache_salt
        for index, digest in enumerate(request.digests):
            block = self._by_digest.get(digest)
            if block is None or block.parent != parent:
                break
            if block.tokens != request.tokens(index * size, (index + 1) * size):
                break
            found.append(block)
            parent = block.number
        return found

    def register(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the request's first tokens known, so many. They are written."""
        size, chain = self.pool.block_size, request.chain
        full = num_tokens // size
        if full <= len(chain):
            return
        if request.chain_checked != self._removed:  # else all that was in it is there still
            # Where it hangs on another's block that is gone by now, its own takes the place.
            gone = (i for i, block in enumerate(chain) if block.block_id == NULL_BLOCK)
            del chain[next(gone, len(chain)) :]
        before = self._removed  # inserting may remove others' blocks, and those are looked at anew
        self._extend_digests(request, full)
        for index in range(len(chain), full):
            block = self._insert(
                chain[-1].number if chain else request.cache_salt,
                request.tokens(index * size, (index + 1) * size),
                request.digests[index],
                request.block_table[index],
            )
            chain.append(block)
        request.chain_checked = before

    def forget(self, request: Request) -> None:
        """Find no more what the request holds, or held before it was preempted."""
        for block_id in request.block_table:
            if (block := self._by_block.get(block_id)) is not None:
                self._forget(block)
        for digest in request.digests:
            if (block := self._by_digest.get(digest)) is not None:
                self._forget(block)

    def clear(self) -> None:
        """Find nothing any more."""
        for block in list(self._by_digest.values()):
            self._forget(block)

    def count(self, num_tokens: int, num_found: int) -> None:
        """Note that a request has started with so many tokens, and how many of them were here."""
        self.queries += num_tokens
        self.hits += num_found

    def _insert(
        self, parent: int | str | None, tokens: tuple[int, ...], digest: bytes, block_id: int
    ) -> CachedBlock:
        known = self._by_digest.get(digest)
        if known is not None:
            if known.parent == parent and known.tokens == tokens:
                return known  # two sequences computed the same at once: the first one counts
            self._forget(known)
        if (old := self._by_block.get(block_id)) is not None:
            self._forget(old)
        block = CachedBlock(next(self._numbers), parent, tokens, digest, block_id)
        self._by_digest[digest] = self._by_block[block_id] = block
        self.pool.keep(block_id)
        return block

    def _forget(self, block: CachedBlock) -> None:
        self.pool.drop(block.block_id)
        self._remove(block)

    def _evict(self, block_id: int) -> None:
        self._remove(self._by_block[block_id])
        self.evictions += 1

    def _remove(self, block: CachedBlock) -> None:
        del self._by_digest[block.digest], self._by_block[block.block_id]
        block.block_id = NULL_BLOCK
        self._removed += 1

    def _extend_digests(self, request: Request, count: int) -> None:
        size, digests = self.pool.block_size, request.digests
        if len(digests) >= count:
            return
        if digests:
            last = digests[-1]
        else:
            last = self._digest(b"", (request.cache_salt or "").encode("utf-8", "surrogatepass"))
        for index in range(len(digests), count):
            tokens = request.tokens(index * size, (index + 1) * size)
            last = self._digest(last, array("q", tokens).tobytes())
            digests.append(last)

    def _digest(self, previous: bytes, content: bytes) -> bytes:
        return hashlib.sha256(self._key + previous + content).digest()
