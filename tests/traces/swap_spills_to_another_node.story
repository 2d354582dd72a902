The store on the worker's node is too small for the payload; another node's takes it, and the
request comes back from there. Nobody is refused, and nothing is left in either.

given
    block size 8
    worker w0 blocks 3 node n0 step 20
    store s0 budget 2 node n0
    store s1 budget 8 node n1
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    never k1 -> s0 Reserve c0
    come c1
    see k1 -> s1 Reserve c0
    see k1 -> w0 SwapOut c0
    see w0 -> s1 Commit c0
    see k1 -> w0 SwapIn c0
    see w0 hears FetchDone status=ok
    see k1 -> s1 Release c0
    allow
    finish
    expect c0 tokens == 6
    expect w0 requests_swapped_total == 1
    expect w0 requests_resumed_total == 1
    expect w0 recomputed == 0
    expect s0 rejected == 0
    expect s1 rejected == 0
