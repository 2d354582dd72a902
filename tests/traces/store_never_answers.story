The store is stopped in the middle of a swap and never answers again.
Rule: every swap state has a deadline; on expiry the blocks stay and the request goes on.

given
    block size 8
    worker w0 blocks 3 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 17 max 6
    client c1 prompt 17 max 6

story
    come c0
    see w0 -> g0 Tokens c0 index=0
    come c1
    see s0 -> w0 PutGrant c0
    stop s0
    see w0 hears PutDone ok=false
    expect w0 has c0 decode
    run 3000
    expect c0 tokens == 6
    expect c1 tokens == 6
    go s0
    finish
    expect w0 kv_cpu_offload_failed_total == 1
