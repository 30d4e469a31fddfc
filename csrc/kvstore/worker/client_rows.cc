// Rows of a key, as a worker pushes and pulls them.
#include <utility>

#include "base/error.h"
#include "kvstore/store/rows.h"
#include "kvstore/worker/client.h"

namespace ringtrain {
namespace {

void require_rows(const StoreClient::Rows& rows, const ClientKey& key) {
  const std::string name = "key \"" + *key.name + "\"";
  if (rows.elements == 0 || key.count % rows.elements != 0)
    throw invalid(name + " has no rows of " + std::to_string(rows.elements) + " elements");
  const auto count = static_cast<int64_t>(key.count / rows.elements);
  for (size_t i = 0; i < rows.numbers.size(); ++i) {
    const int64_t row = rows.numbers[i];
    if (row < 0 || row >= count)
      throw invalid(name + " has " + std::to_string(count) + " rows, but row " + std::to_string(row) + " is asked for");
    if (i > 0 && row <= rows.numbers[i - 1]) throw invalid("rows of " + name + " must be in order, each once");
  }
}

char* from(const HostArray& array, size_t element) {
  return static_cast<char*>(array.address) + element * size_of(array.dtype);
}

}  // namespace

std::shared_ptr<StoreHandle> StoreClient::push_rows(uint32_t store, uint32_t id, const Rows& rows, const Pushed& values,
                                                    int priority, bool copies) {
  if (values.quantizer.kind != Quantizer::Kind::none) throw invalid("rows are pushed as they are, not as codes");
  Work work;
  work.priority = priority;
  work.copies = copies;
  {
    const Lock lock(mutex_);
    begin(work, store, {id}, "push");
    add_rows(work, store, id, rows, &values, nullptr);
  }
  return carry_out(std::move(work), store, {id});
}

std::shared_ptr<StoreHandle> StoreClient::pull_rows(uint32_t store, uint32_t id, const Rows& rows, const HostArray& out,
                                                    int priority) {
  Work work;
  work.priority = priority;
  {
    const Lock lock(mutex_);
    begin(work, store, {id}, "pull");
    add_rows(work, store, id, rows, nullptr, &out);
  }
  return carry_out(std::move(work), store, {});
}

// A push is one of every chunk, so that all of them count it; a pull is of those in which there are rows.
void StoreClient::add_rows(Work& work, uint32_t store, uint32_t id, const Rows& rows, const Pushed* pushed,
                           const HostArray* out) {
  ClientKey& key = store_of(store).key(id);
  require_rows(rows, key);
  const HostArray& array = pushed ? pushed->values : *out;
  require_fitting(array, key, rows.numbers.size() * rows.elements);
  if (pushed) ++key.pushes;
  for (const ClientPiece& piece : key.pieces) {
    const auto chunks = std::make_shared<const ChunkRows>(
        rows_of_piece(*piece.part->layout, piece.number, rows.numbers, rows.elements, pushed != nullptr));
    const auto add_remote_rows = [&] {
      add_remote(work, store, key, piece, pushed, out);
      RemoteOperation& operation = work.remote.back();
      operation.rows = chunks;
      if (pushed) operation.values = from(array, 0);
      if (out) operation.out = from(array, 0);
    };
    if (!piece.part->actor) {
      add_remote_rows();
      continue;
    }
    std::shared_ptr<const RemoteOperation> other_way;
    if (options_.remote.return_s > 0) {
      add_remote_rows();
      other_way = take_other_way(work);
    }
    for (const RowsOfChunk& of_chunk : *chunks) {
      DirectItem item = {piece.part->actor.get(),
                         of_chunk.chunk,
                         key.pushes,
                         {},
                         {},
                         {},
                         work.handle,
                         key.name,
                         piece.part->server,
                         store,
                         piece.part->number,
                         {chunks, &of_chunk.ranges},
                         other_way};
      if (pushed) {
        item.source = {from(array, of_chunk.begin), array.dtype, {}};
        item.rates = pushed->rates;
      }
      if (out) item.answer = {from(array, of_chunk.begin), array.dtype};
      work.direct.push_back(std::move(item));
    }
  }
}

}  // namespace ringtrain
