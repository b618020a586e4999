// Attention of a batch's rows: cuts the work into pieces that do not depend on the number of threads,
// and merges what belongs together.
#include "attention.h"
#include "attention_calls.h"
#include "parallel.h"

using namespace yo;

namespace {

constexpr int64_t FEW = 32;             // folded rows of a sequence that are bound by memory
constexpr int64_t FEW_ROWS = 16;        // of them, at once
constexpr int64_t FEW_BYTES = 524288;   // of keys and values, at once
constexpr int64_t FEW_KEYS = 1024;      // and no more than so many keys
constexpr int64_t MANY_KEYS = 4096;     // where there are too few blocks of rows for all threads:
constexpr int64_t MANY_UNITS = 8;       // fewer than so many of a sequence
constexpr int64_t SERIAL_BYTES = 98304; // less is done sooner than a second thread wakes up

struct Queries {
    const char* q;
    int64_t row, head;
    char* out;
    int64_t rows, heads;
};

struct Unit {
    int64_t seq, group, row, rows, first, stop;
    int64_t place;  // of its partial result; -1: it is the whole result
    bool many;
};
struct Merge {
    int64_t group, row, rows, place, parts;
};
struct Plan {
    std::vector<Unit> units;
    std::vector<Merge> merges;
    int64_t partial = 0, bytes = 0;
};

struct Job {
    const Pool& pool;
    const Sequences& seqs;
    const Own* own;
    const Queries& queries;
    float scale, softcap;
    int64_t window() const { return own ? pool.size : 0; }
    int64_t heads() const { return queries.heads / pool.groups; }
    int64_t width() const { return padded(pool.v_dim); }
    int64_t element() const { return pool.is_bf16 ? 2 : 4; }
};

int64_t own_start(const Job& job, int64_t seq) {
    const int64_t* cu = job.own->cu_seqlens;
    return std::max<int64_t>(0, job.seqs.kv_lens[seq] - (cu[seq + 1] - cu[seq]));
}

// The keys that a row sees: [first, stop).
void range_of(const Job& job, int64_t seq, int64_t row, int64_t& first, int64_t& stop) {
    int64_t position = job.seqs.positions[row];
    first = job.own ? std::max<int64_t>(0, position - job.window() + 1) : 0;
    stop = position + 1;
    if (job.own) {
        const int64_t* cu = job.own->cu_seqlens;
        stop = std::min(stop, own_start(job, seq) + cu[seq + 1] - cu[seq]);
    } else {
        stop = std::min(stop, job.seqs.table_width * job.pool.size);
    }
}

void plan_block(const Job& job, Plan& plan, int64_t seq, int64_t row, int64_t rows, bool many,
                int64_t most_keys) {
    int64_t first = INT64_MAX, stop = 0;
    for (int64_t r = row; r < row + rows; ++r) {
        int64_t a, b;
        range_of(job, seq, r, a, b);
        first = std::min(first, a), stop = std::max(stop, b);
    }
    first = std::min(first, stop);
    const int64_t parts = std::max<int64_t>(1, (stop - first + most_keys - 1) / most_keys);
    const int64_t size = rows * job.heads() * (job.width() + 2);
    const int64_t key_bytes = (job.pool.k_dim + job.pool.v_dim) * job.element();
    plan.bytes += (stop - first) * key_bytes * job.pool.groups * (many ? 8 : 1);
    for (int64_t group = 0; group < job.pool.groups; ++group) {
        if (parts == 1) {
            plan.units.push_back({seq, group, row, rows, first, stop, -1, many});
            continue;
        }
        plan.merges.push_back({group, row, rows, plan.partial, parts});
        for (int64_t i = 0; i < parts; ++i) {
            int64_t from = first + i * most_keys;
            plan.units.push_back(
                {seq, group, row, rows, from, std::min(stop, from + most_keys), plan.partial, many});
            plan.partial += size;
        }
    }
}

void make_plan(const Job& job, Plan& plan) {
    plan.units.clear(), plan.merges.clear();
    plan.partial = plan.bytes = 0;
    const int64_t heads = job.heads(), groups = job.pool.groups;
    const int64_t key_bytes = (job.pool.k_dim + job.pool.v_dim) * job.element();
    const int64_t few_keys = std::min(FEW_KEYS, std::max<int64_t>(64, FEW_BYTES / key_bytes / 64 * 64));
    const int64_t few_rows = std::max<int64_t>(1, FEW_ROWS / heads);
    const int64_t most = many_rows_block(job.pool.k_dim, job.pool.v_dim);
    for (int64_t seq = 0; seq < job.seqs.count; ++seq) {
        const int64_t begin = job.seqs.cu_seqlens[seq], end = job.seqs.cu_seqlens[seq + 1];
        const int64_t folded = (end - begin) * heads;
        if (folded == 0) continue;
        if (folded < FEW || end - begin == 1) {
            for (int64_t row = begin; row < end; row += few_rows)
                plan_block(job, plan, seq, row, std::min(few_rows, end - row), false, few_keys);
            continue;
        }
        // Smaller blocks where there would be too few of them for all threads.
        int64_t block = std::min(most, std::max<int64_t>(48, folded * groups / MANY_UNITS));
        int64_t rows = std::max<int64_t>(1, block / heads);
        int64_t blocks = (end - begin + rows - 1) / rows;
        int64_t keys = blocks * groups < MANY_UNITS ? MANY_KEYS : INT64_MAX;
        for (int64_t i = blocks - 1; i >= 0; --i)  // the longest first
            plan_block(job, plan, seq, begin + i * rows, std::min(rows, end - begin - i * rows), true,
                       keys);
    }
}

Keys keys_of(const Job& job, int64_t seq, int64_t group) {
    const Pool& pool = job.pool;
    Keys keys{};
    keys.k = pool.k + group * pool.k_head, keys.v = pool.v + group * pool.v_head;
    keys.k_block = pool.k_block, keys.v_block = pool.v_block;
    keys.k_row = pool.k_row, keys.v_row = pool.v_row;
    keys.size = pool.size;
    keys.start = keys.stop = INT64_MAX;
    if (!job.own) {
        keys.table = job.seqs.table + seq * job.seqs.table_row;
        return keys;
    }
    const Own& own = *job.own;
    keys.k += job.seqs.slots[seq] * pool.k_block, keys.v += job.seqs.slots[seq] * pool.v_block;
    keys.start = own_start(job, seq);
    const int64_t token = own.cu_seqlens[seq];
    keys.own_k = own.k + group * own.k_head + token * own.k_row;
    keys.own_v = own.v + group * own.v_head + token * own.v_row;
    keys.own_k_row = own.k_row, keys.own_v_row = own.v_row;
    return keys;
}

char* out_row(const Job& job, int64_t group, int64_t row, int64_t folded) {
    const int64_t heads = job.heads();
    int64_t head = (row + folded / heads) * job.queries.heads + group * heads + folded % heads;
    return job.queries.out + head * job.pool.v_dim * job.element();
}

// Weighted values become weighted means; rows that saw nothing are zero.
template <class T>
void put_row(const float* values, float total, T* out, int64_t dim) {
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    int64_t d = 0;
    for (; d + VL <= dim; d += VL) store(out + d, load(values + d) * factor);
    if (d < dim) store_some(out + d, load(values + d) * factor, (int)(dim - d));
}
void finish(const Job& job, const float* values, float total, char* out) {
    if (job.pool.is_bf16)
        put_row(values, total, (bf16*)out, job.pool.v_dim);
    else
        put_row(values, total, (float*)out, job.pool.v_dim);
}

void run_unit(const Job& job, const Unit& unit, float* partials) {
    const Queries& queries = job.queries;
    const int64_t folded = unit.rows * job.heads(), width = job.width();
    Work work{};
    work.keys = keys_of(job, unit.seq, unit.group);
    work.q = queries.q + unit.row * queries.row + unit.group * job.heads() * queries.head;
    work.q_row = queries.row, work.q_head = queries.head;
    work.positions = job.seqs.positions + unit.row;
    work.rows = unit.rows, work.heads = job.heads();
    work.first = unit.first, work.stop = unit.stop;
    work.window = job.window();
    work.k_dim = job.pool.k_dim, work.v_dim = job.pool.v_dim;
    work.scale = job.scale, work.softcap = job.softcap;
    work.values = unit.place < 0 ? (float*)scratch<1>(folded * (width + 2) * sizeof(float))
                                 : partials + unit.place;
    work.peak = work.values + folded * width, work.total = work.peak + folded;
    (unit.many ? attend_many : attend_few)(work, job.pool.is_bf16);
    if (unit.place < 0)
        for (int64_t f = 0; f < folded; ++f)
            finish(job, work.values + f * width, work.total[f],
                   out_row(job, unit.group, unit.row, f));
}

void run_merge(const Job& job, const Merge& merge, float* partials, int64_t f) {
    const int64_t folded = merge.rows * job.heads(), width = job.width();
    const int64_t size = folded * (width + 2);
    const float* part = partials + merge.place;
    float* values = (float*)scratch<1>(width * sizeof(float));
    std::memset(values, 0, width * sizeof(float));
    float peak = LOWEST, total = 0.0f;
    for (int64_t i = 0; i < merge.parts; ++i)
        peak = std::max(peak, part[i * size + folded * width + f]);
    for (int64_t i = 0; i < merge.parts; ++i, part += size) {
        const float factor = std::exp2(part[folded * width + f] - peak);
        total += factor * part[folded * width + folded + f];
        for (int64_t d = 0; d < width; d += VL)
            store(values + d, load(values + d) + load(part + f * width + d) * factor);
    }
    finish(job, values, total, out_row(job, merge.group, merge.row, f));
}

}  // namespace

extern "C" {

// Attention of q [rows, heads, k_dim] over pages, or over rings and a step's own tokens (`own` is
// null for pages); out [rows, heads, v_dim] is dense. Rows that belong to no sequence become zero.
void yo_attend(const Pool* pool, const Sequences* sequences, const Own* own, const void* q,
               int64_t q_row, int64_t q_head, void* out, int64_t rows, int64_t heads, float scale,
               float softcap, int threads) {
    const Queries queries{(const char*)q, q_row, q_head, (char*)out, rows, heads};
    const Job job{*pool, *sequences, own, queries, scale, softcap};
    static thread_local Plan plan_memory;
    Plan& plan = plan_memory;
    make_plan(job, plan);
    float* partials = (float*)scratch<2>(plan.partial * sizeof(float));
    if (plan.bytes < SERIAL_BYTES) threads = 1;
    parallel_items(threads, (int64_t)plan.units.size(),
                   [&](int64_t i) { run_unit(job, plan.units[i], partials); });
    for (const Merge& merge : plan.merges)
        parallel_items(merge.parts < 16 ? 1 : threads, merge.rows * job.heads(),
                       [&](int64_t f) { run_merge(job, merge, partials, f); });
    const int64_t used = job.seqs.count ? job.seqs.cu_seqlens[job.seqs.count] : 0;
    const int64_t row_bytes = heads * job.pool.v_dim * job.element();
    if (used < rows) std::memset((char*)out + used * row_bytes, 0, (rows - used) * row_bytes);
}

}  // extern "C"
