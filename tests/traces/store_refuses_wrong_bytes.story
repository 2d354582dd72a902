The bytes in the slab are not what the worker hashed.
Rule: commit comes after the checksum, so the swap fails and the request goes on where it is.

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
    hold w0 -> s0 FinishPut c0
    come c1
    see w0 -> k1 WorkerReport
    run 60
    rot s0
    release
    see s0 -> w0 StoreReply c0 status=bad_payload
    expect s0 tickets_committed == 0
    run 5
    expect w0 has c0 decode
    finish
    expect c0 tokens == 6
