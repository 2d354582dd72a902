The store's budget is nothing: the swap is refused, counted, and everybody still finishes.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 0
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see s0 -> k1 StoreReply c0 status=over_budget
    never k1 -> w0 SwapOut c0
    finish
    expect w0 requests_swapped_total == 0
    expect s0 rejected >= 1
    expect c0 tokens == 6
    expect c1 tokens == 6
