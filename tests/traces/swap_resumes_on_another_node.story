A request is swapped out on one node and resumed on the other, whose worker becomes free first: its
KV travels from the first node's store, and nothing is computed twice.

given
    block size 8
    worker w0 blocks 3 node n0 step 20
    worker w1 blocks 3 node n1 step 20
    store s0 budget 8 node n0
    store s1 budget 8 node n1
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 3
    client c2 prompt 17 max 6
    set prefetch_blocks 0

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w1 Admit c1
    come c2
    see k1 -> s0 Reserve c0
    see k1 -> w0 SwapOut c0
    see w0 -> s0 Commit c0
    see k1 -> w1 SwapIn c0
    see w1 -> s0 BeginGet c0
    see w1 hears FetchDone status=ok
    see k1 -> s0 Release c0
    finish
    expect c0 tokens == 6
    expect w0 requests_swapped_total == 1
    expect w1 requests_resumed_total == 1
    expect w0 recomputed == 0
    expect w1 recomputed == 0
