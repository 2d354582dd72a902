The order to swap out is late; the victim generates on meanwhile.
Rule: Reserve names an upper bound, and Commit returns the difference.

given
    block size 2
    worker w0 blocks 6 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 2 max 9
    client c1 prompt 9 max 2
    set reserve_slack_tokens 4

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    hold k1 -> w0 SwapOut c0
    come c1
    see s0 -> k1 StoreReply c0 status=ok
    expect s0 used_bytes >= 192
    see w0 -> g0 Tokens c0 index=2
    release
    see s0 -> w0 StoreReply c0 status=ok
    see w0 -> s0 Commit c0
    see s0 -> w0 StoreReply c0 status=ok
    expect s0 used_bytes <= 192
    expect s0 pages_free >= 5
    finish
    expect c0 tokens == 9
