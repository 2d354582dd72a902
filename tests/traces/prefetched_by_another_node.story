A request is swapped out on one node. The other node's worker will have room first, so it fetches the
payload while its own request still runs; the resume takes it from there and asks the store for
nothing.

given
    block size 8
    worker w0 blocks 3 node n0 step 20
    worker w1 blocks 3 node n1 step 20
    store s0 budget 8 node n0
    store s1 budget 8 node n1
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 4
    client c2 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see k1 -> w1 Admit c1
    come c2
    see k1 -> w0 SwapOut c0
    see w0 -> s0 Commit c0
    see k1 -> w1 Prefetch c0
    see w1 -> s0 BeginGet c0
    see k1 -> w1 SwapIn c0
    never w1 -> s0 BeginGet c0
    see w1 hears FetchDone status=ok ahead=true
    finish
    expect c0 tokens == 6
    expect w1 prefetches == 1
    expect w1 prefetches_used == 1
    expect w1 prefetches_wasted == 0
    expect w1 requests_resumed_total == 1
    expect w1 recomputed == 0
