#include "kvstore/store/part.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace ringtrain {

PartMemory PartMemory::create_shared(size_t bytes) {
  SharedSegment segment = SharedSegment::create(bytes, 0);
  char* const data = segment.data();
  return {std::move(segment), data, bytes};
}

PartMemory PartMemory::create_private(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED)
    throw failure("cannot have " + std::to_string(bytes >> 20) + " MB for keys: " + std::strerror(errno));
  return {SharedSegment(), static_cast<char*>(data), bytes};
}

PartMemory PartMemory::attach(int64_t creator_pid, uint64_t ticket, size_t bytes) {
  SharedSegment segment = SharedSegment::attach(creator_pid, ticket, bytes);
  char* const data = segment.data();
  return {std::move(segment), data, bytes};
}

PartMemory::PartMemory(SharedSegment segment, char* data, size_t bytes)
    : segment_(std::move(segment)), data_(data), bytes_(bytes) {}

PartMemory::PartMemory(PartMemory&& other) noexcept
    : segment_(std::move(other.segment_)), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

PartMemory::~PartMemory() {
  if (!is_shared() && data_) munmap(data_, bytes_);
}

void PartMemory::reserve(size_t offset, size_t bytes) {
  if (is_shared() && bytes > 0) segment_.reserve(offset, bytes);
}

namespace {

// The compiler keeps the order of stores on both sides: a process may be killed between any two. The processor need
// not: the mutex of a dead owner is locked again only after all stores that its process has executed are visible.
void in_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Copies the records that a journal keeps, to it or, if `is_back`, to where they belong.
void copy_kept(Part& part, size_t chunk, JournalRecord& journal, bool is_back) {
  const auto move = [is_back](char* there, char* kept, size_t bytes) {
    is_back ? std::memcpy(there, kept, bytes) : std::memcpy(kept, there, bytes);
  };
  constexpr size_t kOfChunk = sizeof(ChunkRecord) - kChunkKeptAt;
  char* const kept = reinterpret_cast<char*>(&journal + 1);
  move(reinterpret_cast<char*>(&part.record(chunk)) + kChunkKeptAt, kept, kOfChunk);
  if (journal.workers == 0) return;
  move(reinterpret_cast<char*>(&part.worker(chunk, journal.first_worker)), kept + kOfChunk,
       journal.workers * sizeof(WorkerRecord));
}

// Takes a journal that is free, that of `first` before others, for a chunk that is held. A journal belongs to a chunk,
// not to a process: one that is stopped in a change keeps it, also where another one has its place by now.
uint32_t take_journal(Part& part, size_t chunk, uint32_t first) {
  const uint32_t count = part.layout().journals();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t journal = (first + i) % count;
    uint32_t none = 0;
    if (part.journal_place(journal).chunk.compare_exchange_strong(none, static_cast<uint32_t>(chunk) + 1))
      return journal;
  }
  throw failure("more processes change the keys of a store than it has workers: were some started twice?");
}

void put_text(char* place, const std::string& text) {
  if (text.size() >= RuleRecord::kLongestName) throw invalid("\"" + text + "\" is too long a name for an optimizer");
  std::memcpy(place, text.c_str(), text.size() + 1);
}

// How the records of the chunk were before a change that has not come to its end.
void restore(Part& part, size_t chunk) {
  ChunkRecord& record = part.record(chunk);
  JournalRecord& journal = part.journal(record.journal.load(std::memory_order_acquire) - 1);
  if (record.closed.load(std::memory_order_acquire) == journal.closed) {
    copy_kept(part, chunk, journal, true);
    std::memcpy(journal.moved, journal.moved_before, sizeof(journal.moved));
    for (size_t i = journal.first_worker; i < journal.first_worker + journal.workers; ++i)
      if (const uint32_t last = part.worker(chunk, i).last_slot) part.slot(i, last).next = kNoSlot;
  }
  in_order();
  record.journal.store(0, std::memory_order_release);
}

// Throws where values and records alone are more than this host has: before they are laid out, which takes memory, too.
void require_room(const PartSpec& spec) {
  const auto capacity = static_cast<size_t>(spec.capacity);
  const size_t per_chunk = sizeof(ChunkRecord) + capacity * sizeof(WorkerRecord);
  size_t bytes = 0;
  for (const KeyPiece& piece : spec.pieces) {
    const size_t of_piece = piece.count * size_of(piece.dtype);
    bytes += of_piece + (of_piece / Layout::kChunkBytes + 1) * per_chunk;
  }
  const size_t there = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes <= there) return;
  constexpr int kMb = 20;
  throw failure("keys of " + std::to_string(bytes >> kMb) + " MB cannot be kept by a server with " +
                std::to_string(there >> kMb) + " MB of memory: start more servers, on more hosts");
}

}  // namespace

std::shared_ptr<Part> Part::create(const PartSpec& spec, int workers, Memory memory) {
  require_room(spec);
  const size_t bytes = Layout(spec).bytes();
  PartMemory place = memory == Memory::shared ? PartMemory::create_shared(bytes) : PartMemory::create_private(bytes);
  const std::shared_ptr<Part> part(new Part(spec, std::move(place)));
  part->initialize(workers);
  return part;
}

std::shared_ptr<Part> Part::attach(const PartSpec& spec, int64_t creator_pid, uint64_t ticket) {
  return std::shared_ptr<Part>(new Part(spec, PartMemory::attach(creator_pid, ticket, Layout(spec).bytes())));
}

void Part::initialize(int workers) {
  memory_.reserve(0, layout_.control_bytes());
  memory_.reserve(layout_.array_at(0), layout_.value_bytes());
  for (int i = 0; i < workers; ++i) presence(static_cast<size_t>(i)).store(Presence::here);
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  for (size_t i = 0; i < chunk_count(); ++i) pthread_mutex_init(&record(i).mutex, &kind);
  for (size_t i = 0; i < layout_.capacity(); ++i) pthread_mutex_init(&stage(i).mutex, &kind);
  pthread_mutexattr_destroy(&kind);
}

void Part::raise_first_term(size_t worker, uint32_t term) {
  std::atomic<uint32_t>& first = place_of(worker).first_term;
  uint32_t known = first.load();
  while (known < term && !first.compare_exchange_weak(known, term)) {
  }
  if (layout_.stage_bytes() == 0) return;
  std::atomic<uint64_t>& word = stage(worker).state;
  StageState state = {word.load()};
  while (!word.compare_exchange_weak(state.word, state.closed_before(term).word)) {
  }
}

int Part::holder(size_t chunk) {
  const uint32_t holder = record(chunk).holder.load(std::memory_order_relaxed);
  return holder == 0 || holder - 1 == layout_.actor_of_server() ? -1 : static_cast<int>(holder) - 1;
}

uint32_t Part::add_rule(const std::string& name, const std::string& form,
                        const std::map<std::string, double>& numbers) {
  const UpdateRule rule(name, form, numbers);
  for (const KeyPiece& piece : spec().pieces)
    if (!is_float(piece.dtype))
      throw invalid(std::string("an optimizer updates floating-point values only, but a key is ") +
                    name_of(piece.dtype));
  if (numbers.size() > RuleRecord::kMostNumbers) throw invalid("an optimizer has too many numbers");
  const uint32_t number = header().rule.load(std::memory_order_relaxed) + 1;
  RuleRecord& record = rule_record(number);
  record.number = 0;
  put_text(record.name, name);
  put_text(record.form, form);
  record.count = 0;
  for (const auto& [which, value] : numbers) {
    RuleRecord::Number& place = record.numbers[record.count++];
    put_text(place.name, which);
    place.value = value;
  }
  reserve_states(rule);
  record.number = number;
  header().rule.store(number, std::memory_order_release);
  return number;
}

std::shared_ptr<const UpdateRule> Part::rule(uint32_t number) {
  const RuleRecord& record = rule_record(number);
  if (number == 0 || record.number != number) return nullptr;
  std::map<std::string, double> numbers;
  for (uint32_t i = 0; i < record.count; ++i) numbers[record.numbers[i].name] = record.numbers[i].value;
  return std::make_shared<UpdateRule>(record.name, record.form, numbers);
}

void Part::reserve_states(const UpdateRule& rule) {
  for (size_t i = 0; i < rule.state_names().size(); ++i) memory_.reserve(layout_.array_at(2 + i), layout_.wide_bytes());
  for (const KeyChunk& chunk : layout_.chunks())
    if (is_half(chunk.dtype)) memory_.reserve(layout_.array_at(1, chunk), layout_.room_of(1, chunk));
}

HeldChunk::HeldChunk(Part& part, size_t chunk, uint32_t actor) : part_(part), chunk_(chunk) {
  ChunkRecord& record = part.record(chunk);
  const int code = pthread_mutex_trylock(&record.mutex);
  if (code == EBUSY) return;
  if (code != 0 && code != EOWNERDEAD) throw failure(std::string("cannot lock a key: ") + std::strerror(code));
  is_held_ = true;
  if (code == EOWNERDEAD) put_back();
  record.holder.store(actor + 1, std::memory_order_relaxed);
}

HeldChunk::~HeldChunk() {
  if (is_held_) pthread_mutex_unlock(&part_.record(chunk_).mutex);
}

// Its process may also have died before the journal that it took was the one of the record, or after that.
void HeldChunk::put_back() {
  ChunkRecord& record = part_.record(chunk_);
  if (record.journal.load(std::memory_order_acquire) != 0) restore(part_, chunk_);
  for (uint32_t i = 0; i < part_.layout().journals(); ++i)
    if (part_.journal_place(i).chunk.load() == chunk_ + 1) part_.journal_place(i).chunk.store(0);
  pthread_mutex_consistent(&record.mutex);
}

// A record that a dead process has left half written has an odd version.
HeldStage::HeldStage(Part& part, size_t worker) : mutex_(part.stage(worker).mutex) {
  const int code = pthread_mutex_trylock(&mutex_);
  if (code == EBUSY) return;
  if (code != 0 && code != EOWNERDEAD) throw failure(std::string("cannot lock a push: ") + std::strerror(code));
  is_held_ = true;
  if (code == EOWNERDEAD) pthread_mutex_consistent(&mutex_);
}

HeldStage::~HeldStage() {
  if (is_held_) pthread_mutex_unlock(&mutex_);
}

ChunkChange::ChunkChange(Part& part, size_t chunk, uint32_t actor, uint32_t arrays, Workers workers)
    : part_(part), chunk_(chunk), arrays_(arrays), journal_(take_journal(part, chunk, actor)) {
  try {
    reserve();
  } catch (...) {
    part_.journal_place(journal_).chunk.store(0, std::memory_order_release);
    throw;
  }
  begin(workers);
}

// One process reserves memory for all.
void ChunkChange::reserve() {
  constexpr uint32_t kRecord = 1u << kArrays;
  const Layout& layout = part_.layout();
  std::atomic<uint32_t>& reserved = part_.journal_place(journal_).reserved;
  const uint32_t missing = (arrays_ | kRecord) & ~reserved.load(std::memory_order_relaxed);
  if (missing == 0) return;
  if (missing & kRecord) part_.memory().reserve(layout.journal_at(journal_), layout.journal_header_bytes());
  for (size_t i = 0; i < kArrays; ++i)
    if (missing >> i & 1) part_.memory().reserve(layout.spare_at(journal_, i), layout.chunk_bytes());
  reserved.store(reserved.load(std::memory_order_relaxed) | missing, std::memory_order_relaxed);
}

void ChunkChange::begin(Workers workers) {
  const Layout& layout = part_.layout();
  const KeyChunk& place = part_.chunk(chunk_);
  ChunkRecord& record = part_.record(chunk_);
  JournalRecord& journal = part_.journal(journal_);
  for (size_t i = 0; i < kArrays; ++i) {
    if (!(arrays_ >> i & 1)) continue;
    char* const home = part_.memory().data() + layout.array_at(i, place);
    if (!part_.memory().is_shared())
      to_[i] = home;
    else if (layout.is_exchanged(i, place))
      to_[i] = part_.memory().data() + layout.spare_at(journal_, i) + journal.moved[i];
    else
      to_[i] = home + (record.moved[i] == 0 ? Layout::second_place(i, place) : 0);
  }
  journal.closed = record.closed.load(std::memory_order_relaxed);
  std::memcpy(journal.moved_before, journal.moved, sizeof(journal.moved));
  journal.first_worker = static_cast<uint32_t>(workers.first);
  journal.workers = static_cast<uint32_t>(workers.count);
  copy_kept(part_, chunk_, journal, false);
  is_open_ = true;
  record.journal.store(journal_ + 1, std::memory_order_release);
  in_order();
}

void ChunkChange::copy_arrays() {
  for (size_t i = 0; i < kArrays; ++i)
    if (to_[i] && to_[i] != part_.array(i, chunk_))
      std::memcpy(to_[i], part_.array(i, chunk_), part_.chunk(chunk_).bytes_of(i));
}

void ChunkChange::commit(uint64_t closes) {
  const Layout& layout = part_.layout();
  const KeyChunk& place = part_.chunk(chunk_);
  ChunkRecord& record = part_.record(chunk_);
  for (size_t i = 0; i < kArrays; ++i) {
    if (!to_[i]) continue;
    char* const spare = part_.memory().data() + layout.spare_at(journal_, i);
    if (part_.memory().is_shared() && layout.is_exchanged(i, place))
      part_.journal(journal_).moved[i] = part_.array(i, chunk_) - spare;
    record.moved[i] = to_[i] - (part_.memory().data() + layout.array_at(i, place));
  }
  in_order();
  record.closed.store(record.closed.load(std::memory_order_relaxed) + closes, std::memory_order_release);
  record.journal.store(0, std::memory_order_release);
  part_.journal_place(journal_).chunk.store(0, std::memory_order_release);
  is_open_ = false;
}

ChunkChange::~ChunkChange() {
  if (!is_open_) return;
  restore(part_, chunk_);
  part_.journal_place(journal_).chunk.store(0, std::memory_order_release);
}

namespace {

// The tables of the servers of this process.
struct Registry {
  Mutex mutex;
  std::map<uint64_t, std::weak_ptr<PartTable>> tables GUARDED_BY(mutex);
};

Registry& registry() {
  static Registry* const one = new Registry;
  return *one;
}

}  // namespace

void PartTable::announce(uint64_t identity, const std::shared_ptr<PartTable>& table) {
  const Lock lock(registry().mutex);
  registry().tables[identity] = table;
}

void PartTable::withdraw(uint64_t identity) {
  const Lock lock(registry().mutex);
  registry().tables.erase(identity);
}

std::shared_ptr<PartTable> PartTable::of_server(uint64_t identity) {
  const Lock lock(registry().mutex);
  const auto found = registry().tables.find(identity);
  return found == registry().tables.end() ? nullptr : found->second.lock();
}

void PartTable::add(uint32_t store, const std::shared_ptr<Part>& part) {
  const Lock lock(mutex_);
  const std::vector<KeyPiece>& pieces = part->spec().pieces;
  for (const KeyPiece& piece : pieces)
    if (places_.count({store, piece.key}))
      throw invalid("key number " + std::to_string(piece.key) + " of store " + std::to_string(store) +
                    " is there already");
  for (size_t i = 0; i < pieces.size(); ++i) places_[{store, pieces[i].key}] = {part, i};
  parts_[store].push_back(part);
}

PartTable::Place PartTable::find(uint32_t store, uint32_t key) const {
  const Lock lock(mutex_);
  const auto found = places_.find({store, key});
  return found == places_.end() ? Place() : found->second;
}

std::vector<std::shared_ptr<Part>> PartTable::parts(uint32_t store) const {
  const Lock lock(mutex_);
  const auto found = parts_.find(store);
  return found == parts_.end() ? std::vector<std::shared_ptr<Part>>() : found->second;
}

}  // namespace ringtrain
